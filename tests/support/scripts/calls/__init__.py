"""Training scripts whose forward does more than compute, or reads more than its arguments."""
