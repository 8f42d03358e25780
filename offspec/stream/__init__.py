"""What feeds a pass: rings of slots, filled from disk and copied to a device while others compute."""
