"""Token shards on disk, how text becomes them, and the order in which training reads them."""
