"""Listeners that other processes and hosts reach: addresses, places, HTTP."""
