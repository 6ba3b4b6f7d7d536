"""Frames between hosts: the one that wants them pulls, and believes nothing that it has not checked."""
