"""The part of the network process that speaks with other nodes for the sidecar of this host."""
