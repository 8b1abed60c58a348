"""Stores tokenised documents in directories that are whole or absent, and maps them into memory."""
