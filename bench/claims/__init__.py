"""What the FSDP paper, the ZeRO paper and course notes claim, what rows say of it, and the settings they leave open."""
