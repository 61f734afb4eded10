"""Builders and oracles that several test folders share."""
