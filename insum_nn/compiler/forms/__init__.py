"""What generated kernels compute (`Form`), their schedules, their text and how they are launched."""
