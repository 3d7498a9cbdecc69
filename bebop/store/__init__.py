"""Everything on disk: run folders, metrics, sinks, caches, tables. No statistics."""
