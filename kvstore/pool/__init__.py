"""A pool of nodes, as one of them sees it: who is alive, who has which blocks, whom to ask, what to tell.

Pure: no clock, no randomness, no socket. Times are handed in, in seconds that never go back, and `Directory` is a
contract; so a simulator runs this very code. Nothing here is an authority: what a directory says is a hint, the node
that is asked looks for itself, and what it sends is verified. Whatever is in doubt is a miss.
"""
