# interlace_cpu: op schemas and CPU kernels. A file's name decides its instruction set: NAME_avx512.cpp, NAME_avx2.cpp,
# anything else is for the baseline of the architecture. The level is chosen at run time.
file(GLOB _cpu_sources CONFIGURE_DEPENDS csrc/ops.cpp csrc/cpu/*.cpp)
set(_avx512 ${_cpu_sources})
list(FILTER _avx512 INCLUDE REGEX "_avx512\\.cpp$")
set(_avx2 ${_cpu_sources})
list(FILTER _avx2 INCLUDE REGEX "_avx2\\.cpp$")

set(INTERLACE_ISA_LEVELS generic)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  # GCC 12 reports its own avx512fintrin.h as reading uninitialised values (GCC bug 105593): not our code
  set_source_files_properties(${_avx512} PROPERTIES COMPILE_OPTIONS
    "-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mavx2;-mfma;-mf16c;-mprefer-vector-width=512;-Wno-uninitialized;-Wno-maybe-uninitialized")
  set_source_files_properties(${_avx2} PROPERTIES COMPILE_OPTIONS "-mavx2;-mfma;-mf16c")
  if(_avx2)
    list(APPEND INTERLACE_ISA_LEVELS avx2)
  endif()
  if(_avx512)
    list(APPEND INTERLACE_ISA_LEVELS avx512)
  endif()
else()
  if(_cpu_sources)
    list(REMOVE_ITEM _cpu_sources ${_avx512} ${_avx2})
  endif()
  target_compile_definitions(interlace_flags INTERFACE INTERLACE_NO_X86)
endif()

if(_cpu_sources)
  add_library(interlace_cpu MODULE ${_cpu_sources})
  set_target_properties(interlace_cpu PROPERTIES PREFIX "")
  target_compile_definitions(interlace_cpu PRIVATE ${INTERLACE_STABLE_ABI})
  target_link_libraries(interlace_cpu PRIVATE interlace_flags interlace_torch_cpu interlace_runtime)
  target_link_options(interlace_cpu PRIVATE -Wl,--as-needed -Wl,-z,defs)  # a missing symbol is a link error, not an import error
  list(APPEND _built interlace_cpu)
endif()
