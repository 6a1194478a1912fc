"""What XLA records in CUDA graphs (its command buffers) where nothing else is said; options of programs add to it."""

IN_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION"

# Options of a program whose kernels may run side by side where they do not depend on each other.
SIDE_BY_SIDE = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
