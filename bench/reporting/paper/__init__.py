"""The FSDP paper's figures and statements beside the rows of a store."""
