"""Runs that outlive their ranks: notices, and the meeting of the devices that are there."""
