"""Frames between hosts: the puller asks for them, and checks everything before it uses it."""
