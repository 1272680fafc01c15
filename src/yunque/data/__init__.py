"""From files to packed batches: readers, built-in corpora, conversations, packing, mixtures, the loader."""
