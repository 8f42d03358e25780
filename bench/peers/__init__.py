"""offspec beside other programs, on the same model in the same memory."""
