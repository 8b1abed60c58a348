"""Sends rows of tokens to the devices that have their experts, in turns and in further rounds."""
