"""Frames between hosts: the puller asks for them, and believes nothing that it has not checked."""
