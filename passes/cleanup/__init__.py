"""Passes that make a captured graph plain before it is planned."""
