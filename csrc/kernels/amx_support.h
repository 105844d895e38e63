// Whether this process may multiply tiles (AMX).
#pragma once

namespace mtserve::kernels {

// True if the processor multiplies tiles of bfloat16 and the system saves them. Asks Linux, which keeps the room for
// eight tiles per thread until asked, for leave for the whole process; code that multiplies no tiles notices nothing.
bool request_amx();

}  // namespace mtserve::kernels
