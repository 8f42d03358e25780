"""offspec compared with other programs, on the same model with the same memory."""
