// AMX's tile instructions on processors without them.
#pragma once

#include <cstdint>

// From now on the kernel's own machine code runs here: the signal that a tile instruction raises is answered by doing
// in plain C++ what Intel's manual says, bit by bit. Any other illegal instruction ends the program as ever.
void trap_amx();

// How many instructions were trapped.
int64_t trapped();
