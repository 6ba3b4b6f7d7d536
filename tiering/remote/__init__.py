"""Remote engines: servers that store whole frames by name, beyond this host's tiers."""
