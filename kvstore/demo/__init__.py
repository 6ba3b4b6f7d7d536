"""`kvstore demo`: twenty questions on this product's own pages, answered with and without the store."""
