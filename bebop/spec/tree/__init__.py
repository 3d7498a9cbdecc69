"""Draft trees: their shape, growth, verification and expected acceptance."""
