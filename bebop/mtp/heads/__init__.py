"""The MTP heads as modules: MiMo's layout, and heads around a decoder layer of transformers."""
