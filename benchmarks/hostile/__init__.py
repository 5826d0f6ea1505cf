"""Hostile inputs: model files, cluster files, plan files and command lines that must be refused."""
