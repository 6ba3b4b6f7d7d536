"""The courier: moves blocks between this node, other nodes and a remote tier. A part of the transfer agent."""
