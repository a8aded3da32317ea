"""Cut a batch into microbatches: find the dimension of each tensor that counts the samples."""
