"""One engine computes a prompt, another one goes on with it: tickets, and waits for what is still being stored."""
