"""From scheduled TensorIR with GPU threads to host C, CUDA C++ and machine code."""
