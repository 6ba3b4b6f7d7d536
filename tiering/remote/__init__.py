"""Remote engines: servers that keep whole frames under a name, beyond this host's tiers."""
