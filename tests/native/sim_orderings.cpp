// Random traffic on the simulated runtime: every schedule is checked for unordered accesses, for wrong bytes and for
// what the index promises. All strategies, with and without injected faults, in turn.
//
//   sim_orderings [--quick] [--seeds N] [--first SEED] [--onload direct|staged] [--offload direct|staged]
//                 [--faults | --no-faults] [--cuda | --no-cuda]
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <string>
#include <unistd.h>

#include "traffic.h"

using namespace mtserve;

namespace {

volatile unsigned long long current_seed = 0;

// A crash must name its seed too.
void on_signal(int) {
  char line[64];
  const int n = std::snprintf(line, sizeof line, "seed %llu: crashed\n", current_seed);
  if (write(1, line, static_cast<size_t>(n)) != n) _exit(2);
  _exit(1);
}

void on_terminate() {
  try {
    std::rethrow_exception(std::current_exception());
  } catch (const std::exception& error) {
    std::printf("seed %llu: uncaught: %s\n", current_seed, error.what());
  } catch (...) {
    std::printf("seed %llu: uncaught\n", current_seed);
  }
  std::fflush(stdout);
  _exit(1);
}

Strategy strategy(const std::string& name) {
  if (name == "direct") return Strategy::direct;
  if (name == "staged") return Strategy::staged;
  std::fprintf(stderr, "unknown strategy %s: use direct or staged\n", name.c_str());
  std::exit(2);
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t seeds = 400, first = 1;
  std::optional<Strategy> onload, offload;
  std::optional<bool> faults, cuda;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--faults" || name == "--no-faults") {
      faults = name == "--faults";
      continue;
    }
    if (name == "--cuda" || name == "--no-cuda") {
      cuda = name == "--cuda";
      continue;
    }
    if (name == "--quick") {
      seeds = 64;
      continue;
    }
    if (i + 1 == argc) return std::fprintf(stderr, "%s needs a value\n", name.c_str()), 2;
    const std::string value = argv[++i];
    if (name == "--seeds") seeds = std::stoull(value);
    else if (name == "--first") first = std::stoull(value);
    else if (name == "--onload") onload = strategy(value);
    else if (name == "--offload") offload = strategy(value);
    else return std::fprintf(stderr, "unknown option %s\n", name.c_str()), 2;
  }
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  std::signal(SIGSEGV, on_signal);
  std::signal(SIGABRT, on_signal);
#endif
  std::set_terminate(on_terminate);

  Traffic::Tally sum;
  Counters seen;
  for (uint64_t seed = first; seed < first + seeds; ++seed) {
    current_seed = seed;
    EngineOptions options;
    options.onload = onload.value_or(seed & 1 ? Strategy::staged : Strategy::direct);
    options.offload = offload.value_or(seed & 2 ? Strategy::staged : Strategy::direct);
    options.read_region = seed % 3 != 0;  // of those that are staged
    Traffic traffic(seed, options, faults.value_or((seed & 4) != 0), cuda.value_or(seed % 5 == 0));
    const std::string problem = traffic.run(2 + static_cast<int>(seed / 8 % 2), 60);
    if (!problem.empty()) return std::printf("seed %llu: %s\n", static_cast<unsigned long long>(seed), problem.c_str()), 1;
    const Traffic::Tally& t = traffic.tally();
    sum.reads += t.reads;
    sum.committed += t.committed;
    sum.failed += t.failed;
    const Counters c = traffic.counters();
    seen.onloads += c.onloads;
    seen.offloads += c.offloads;
    seen.tail_write_backs += c.tail_write_backs;
    seen.host_hit_tokens += c.host_hit_tokens;
    seen.device_hit_tokens += c.device_hit_tokens;
    seen.rows_from_region += c.rows_from_region;
    seen.rows_busy += c.rows_busy;
    seen.rows_without_room += c.rows_without_room;
    seen.unpublished_rows += c.unpublished_rows;
    seen.edited_rows += c.edited_rows;
    seen.truncated_rows += c.truncated_rows;
    seen.device_evicted_pages += c.device_evicted_pages;
    seen.host_evicted_tokens += c.host_evicted_tokens;
    seen.onload_failures += c.onload_failures;
    seen.offload_failures += c.offload_failures;
    seen.offloads_refused_quota += c.offloads_refused_quota;
    seen.offloads_refused_host_full += c.offloads_refused_host_full;
  }
  const auto n = [](uint64_t x) { return static_cast<unsigned long long>(x); };
  std::printf("%llu schedules: %llu batches, %llu failed by injected faults; %llu values read\n", n(seeds), n(sum.committed), n(sum.failed), n(sum.reads));
  std::printf("  %llu onloads (%llu failed), %llu offloads (%llu failed, %llu tails), hits %llu device, %llu host\n", n(seen.onloads),
              n(seen.onload_failures), n(seen.offloads), n(seen.offload_failures), n(seen.tail_write_backs), n(seen.device_hit_tokens), n(seen.host_hit_tokens));
  std::printf("  rows: %llu from the region alone, %llu busy, %llu without room, %llu unpublished, %llu edited, %llu shorter; evicted %llu pages, %llu host tokens; refused %llu by quota, %llu by the host\n",
              n(seen.rows_from_region), n(seen.rows_busy), n(seen.rows_without_room), n(seen.unpublished_rows), n(seen.edited_rows), n(seen.truncated_rows),
              n(seen.device_evicted_pages), n(seen.host_evicted_tokens), n(seen.offloads_refused_quota), n(seen.offloads_refused_host_full));
  std::printf("all ordered, all right\n");
  return 0;
}
