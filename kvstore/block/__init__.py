"""What a block of KV is: its name, its layout, its pages and codecs, and the account of what became of it."""
