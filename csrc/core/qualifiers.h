// How functions shared by host, device and emulator are marked.
#pragma once

#if defined(__CUDACC__)
#define INTERLACE_HD __host__ __device__
#else
#define INTERLACE_HD
#endif
