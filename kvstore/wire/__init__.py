"""The protocol for other languages and hosts: the stubs that protoc makes of `proto/`, checked in as they come."""
