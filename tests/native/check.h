// CHECK, and running tests by name: all a native test needs.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#define CHECK(condition)                                                              \
  do {                                                                                \
    if (!(condition)) {                                                               \
      std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                   \
    }                                                                                 \
  } while (false)

#define CHECK_EQ(a, b)                                                                                        \
  do {                                                                                                        \
    const auto check_a = (a);                                                                                 \
    const auto check_b = (b);                                                                                 \
    if (!(check_a == check_b)) {                                                                              \
      std::fprintf(stderr, "%s:%d: CHECK_EQ(%s, %s) failed: %s and %s\n", __FILE__, __LINE__, #a, #b,         \
                   std::to_string(check_a).c_str(), std::to_string(check_b).c_str());                         \
      std::exit(1);                                                                                           \
    }                                                                                                         \
  } while (false)

using Tests = std::vector<std::pair<const char*, std::function<void()>>>;

// Runs the tests whose name contains an argument, all without one. `--quick` asks for fewer rounds.
inline bool quick = false;

inline int run_tests(int argc, char** argv, const Tests& tests) {
  std::vector<std::string> wanted;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--quick") == 0)
      quick = true;
    else
      wanted.push_back(argv[i]);
  }
  int ran = 0;
  for (const auto& [name, test] : tests) {
    bool chosen = wanted.empty();
    for (const std::string& w : wanted) chosen |= std::string(name).find(w) != std::string::npos;
    if (!chosen) continue;
    std::printf("%s\n", name);
    std::fflush(stdout);
    test();
    ++ran;
  }
  std::printf("%d tests passed\n", ran);
  return ran == 0;
}
