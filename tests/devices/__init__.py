"""What has to hold on CUDA devices, real ones or the fake runtime's, which alone tells of hazards and logs."""
