"""Shared helpers of the tests: contents, sandboxes, drives. Nothing here tests anything."""
