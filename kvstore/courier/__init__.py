"""The courier: blocks from other nodes and remote engines, and to them. A part of the network process."""
