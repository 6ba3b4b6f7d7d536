"""A pool of nodes, as one of them sees it: which are alive, which have blocks, which to ask, and what to announce.

Pure: no clock, no randomness, no socket. Times are arguments, in seconds that never go back. Nothing here is
authoritative: an entry of the directory is a hint, the node that is asked checks its own index, and its blocks are
verified. Whatever is in doubt is a miss.
"""
