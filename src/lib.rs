//! npu-dra
