"""What XLA records in CUDA graphs (its command buffers) where nothing else is said; options of programs add to it."""

IN_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION"
