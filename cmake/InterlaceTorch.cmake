# Finds torch without importing it and without find_package(Torch), which wants a whole CUDA toolkit, adds its own
# -gencode flags and bakes absolute paths into the libraries.
execute_process(COMMAND ${Python_EXECUTABLE} -E ${CMAKE_SOURCE_DIR}/build_backend/target_torch.py ${INTERLACE_TORCH_DIR}
                OUTPUT_VARIABLE _torch OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
list(GET _torch 0 _torch_dir)
if(NOT _torch_dir)
  message(FATAL_ERROR "interlace: torch is not installed in the environment of ${Python_EXECUTABLE}; pip install 'torch>=2.11'")
endif()
list(GET _torch 1 INTERLACE_TORCH_VERSION)
list(GET _torch 2 INTERLACE_TORCH_CUDA)
message(STATUS "interlace: torch ${INTERLACE_TORCH_VERSION}, CUDA '${INTERLACE_TORCH_CUDA}', in ${_torch_dir}")

add_library(interlace_torch_cpu INTERFACE)
target_include_directories(interlace_torch_cpu SYSTEM INTERFACE ${_torch_dir}/include)
target_link_libraries(interlace_torch_cpu INTERFACE ${_torch_dir}/lib/libtorch_cpu.so ${_torch_dir}/lib/libc10.so)
add_library(interlace_torch_cuda INTERFACE)
target_link_libraries(interlace_torch_cuda INTERFACE ${_torch_dir}/lib/libtorch_cuda.so interlace_torch_cpu)
