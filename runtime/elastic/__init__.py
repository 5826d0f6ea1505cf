"""Runs that outlive their ranks: notices, heartbeats, and the meeting of the devices that are there."""
