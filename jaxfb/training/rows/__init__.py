"""Cuts rows, of text or your own, into microbatches and places them on the devices."""
