// What Python holds of the native side. Addresses cross as integers: the caller has checked shapes and dtypes, and a
// call of a few microseconds cannot afford a tensor conversion per argument.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <thread>

#include <dlfcn.h>

#include "engine/engine.h"
#include "engine/layout.h"
#include "runtime/cuda.h"
#include "runtime/threads.h"
#include "index/simulate.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mtserve {
namespace {

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

std::vector<RowRequest> read_requests(uintptr_t users, uintptr_t lengths, uintptr_t token_hashes, uintptr_t context_keys,
                                      int64_t rows, int64_t context_tokens) {
  std::vector<RowRequest> requests(static_cast<size_t>(rows));
  const uint64_t* hashes = at<const uint64_t>(token_hashes);
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t length = at<const int64_t>(lengths)[i];
    constexpr int64_t kLongest = int64_t{1} << 30;
    if (length < 0 || length + context_tokens > kLongest)
      throw std::invalid_argument("history_lengths[" + std::to_string(i) + "] is " + std::to_string(length) +
                                  "; lengths must be between 0 and 2**30, context rows included");
    RowRequest& request = requests[i];
    request.user = at<const int64_t>(users)[i];
    request.tokens = static_cast<int32_t>(length + context_tokens);
    request.context_key = context_keys != 0 ? at<const uint64_t>(context_keys)[i] : 0;
    request.token_hashes = hashes;
    if (hashes != nullptr) hashes += length;
  }
  return requests;
}

[[noreturn]] void raise_cache_error(const std::string& what) {
  PyErr_SetString(nb::module_::import_("mtserve_plugin.errors").attr("CacheError").ptr(), what.c_str());
  throw nb::python_error();
}

// A batch keeps its engine alive, so that nothing is freed under it.
struct NativeBatch {
  std::shared_ptr<Engine> engine;
  std::unique_ptr<Stream> compute;  // the caller's stream of a CUDA device, while the batch is open
  Engine::OpenBatch open;
  std::vector<int64_t> candidates;

  bool wait(int32_t layer, bool in_pages) {
    if (open.loads.empty()) return true;
    bool arrives;
    {
      nb::gil_scoped_release release;
      arrives = engine->wait(open, layer, in_pages);
    }
    if (!arrives)
      if (const std::string error = engine->runtime().error(); !error.empty())
        raise_cache_error("layer " + std::to_string(layer) + ": the device cannot be used any more: " + error);
    return arrives;
  }
};

nb::dict to_dict(const Counters& c, const Gauges& g) {
  nb::dict out;
#define MTSERVE_PUT(from, name) out[#name] = from.name
  MTSERVE_PUT(c, batches);
  MTSERVE_PUT(c, requests);
  MTSERVE_PUT(c, commits);
  MTSERVE_PUT(c, aborts);
  MTSERVE_PUT(c, refused_batches);
  MTSERVE_PUT(c, abandoned_batches);
  MTSERVE_PUT(c, history_tokens);
  MTSERVE_PUT(c, device_hit_tokens);
  MTSERVE_PUT(c, host_hit_tokens);
  MTSERVE_PUT(c, stored_tokens);
  MTSERVE_PUT(c, rows_without_room);
  MTSERVE_PUT(c, rows_from_region);
  MTSERVE_PUT(c, rows_busy);
  MTSERVE_PUT(c, unpublished_rows);
  MTSERVE_PUT(c, edited_rows);
  MTSERVE_PUT(c, truncated_rows);
  MTSERVE_PUT(c, device_evicted_pages);
  MTSERVE_PUT(c, host_evicted_tokens);
  MTSERVE_PUT(c, lost_tokens);
  MTSERVE_PUT(c, onloads);
  MTSERVE_PUT(c, onload_tokens);
  MTSERVE_PUT(c, onload_failures);
  MTSERVE_PUT(c, offloads);
  MTSERVE_PUT(c, offload_tokens);
  MTSERVE_PUT(c, offload_failures);
  MTSERVE_PUT(c, tail_write_backs);
  MTSERVE_PUT(c, offloads_refused_quota);
  MTSERVE_PUT(c, offloads_refused_host_full);
  MTSERVE_PUT(g, entries);
  MTSERVE_PUT(g, open_batches);
  MTSERVE_PUT(g, pages_total);
  MTSERVE_PUT(g, pages_free);
  MTSERVE_PUT(g, pages_clean);
  MTSERVE_PUT(g, pages_dirty);
  MTSERVE_PUT(g, region_pages_total);
  MTSERVE_PUT(g, region_pages_free);
  MTSERVE_PUT(g, slots_total);
  MTSERVE_PUT(g, slots_free);
  MTSERVE_PUT(g, slots_largest_free);
  MTSERVE_PUT(g, pending_offload_tokens);
  MTSERVE_PUT(g, transfers_in_flight);
  MTSERVE_PUT(g, memory_bytes);
#undef MTSERVE_PUT
  return out;
}

// The calls of the CUDA runtime, from the library that has them: this one is built without.
std::shared_ptr<CudaApi> load_cuda(const std::string& library) {
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  const auto make = handle == nullptr ? nullptr : reinterpret_cast<CudaApi* (*)()>(dlsym(handle, "mtserve_make_cuda_api"));
  if (make == nullptr) throw std::runtime_error(library + " cannot be used: " + dlerror());
  return std::shared_ptr<CudaApi>(make());
}

std::unique_ptr<Tier> pinned_arena(const std::shared_ptr<CudaApi>& api, int device, const IndexConfig& config, const Geometry& geometry) {
  Pinner pinner;
  pinner.pin = [api, device](std::byte* at, int64_t bytes) { pin_host_memory(*api, device, at, bytes); };
  pinner.unpin = [api](std::byte* at) { api->unpin(at); };
  return std::make_unique<HostArena>(geometry, int64_t{config.num_chunks} * (config.chunk_tokens / config.slot_tokens), std::move(pinner));
}

// The index alone, for tests and simulation: plans are carried out by whoever asks.
struct PlannedBatch {
  Batch batch;
  std::vector<TransferTask> onloads;
};

}  // namespace

NB_MODULE(_core, m) {
  nb::class_<IndexConfig>(m, "IndexConfig")
      .def(nb::init<>())
      .def_rw("page_size", &IndexConfig::page_size)
      .def_rw("num_pages", &IndexConfig::num_pages)
      .def_rw("chunk_tokens", &IndexConfig::chunk_tokens)
      .def_rw("slot_tokens", &IndexConfig::slot_tokens)
      .def_rw("num_chunks", &IndexConfig::num_chunks)
      .def_rw("offload_quota_tokens", &IndexConfig::offload_quota_tokens)
      .def_rw("tail_write_back", &IndexConfig::tail_write_back)
      .def_rw("max_open_batches", &IndexConfig::max_open_batches);

  nb::class_<NativeBatch>(m, "NativeBatch")
      .def("wait", &NativeBatch::wait, "layer"_a, "in_pages"_a = false)
      .def("stores", [](const NativeBatch& b) { return b.open.batch.stores(); })
      .def("is_uncached", [](const NativeBatch& b) { return b.open.batch.uncached; })
      .def("write_slots",
           [](const NativeBatch& b, uintptr_t address, int32_t page_size) {
             write_slots(b.open.batch, b.candidates, page_size, at<int64_t>(address));
           })
      .def("table_size", [](const NativeBatch& b, int32_t page_size, bool include_delta) { return table_size(b.open.batch, page_size, include_delta); })
      .def("write_table", [](const NativeBatch& b, uintptr_t address, int32_t page_size, bool include_delta) {
        write_table(b.open.batch, page_size, include_delta, at<int32_t>(address));
      });

  nb::class_<Engine>(m, "Engine")
      .def_static(
          "create",
          [](const IndexConfig& config, int32_t num_layers, int64_t k_row_bytes, int64_t v_row_bytes, uintptr_t table, int64_t table_pages,
             bool staged_onload, bool staged_offload, int32_t busy_wait_ms, bool read_region, const std::string& cuda_library, int device,
             bool kernel_onloads) {
            const Geometry geometry{num_layers, config.page_size, config.slot_tokens, k_row_bytes, v_row_bytes};
            const EngineOptions options{staged_onload ? Strategy::staged : Strategy::direct, staged_offload ? Strategy::staged : Strategy::direct, busy_wait_ms, read_region};
            const DeviceTable pages{at<std::byte>(table), table_pages, geometry.page_bytes()};
            // A forked child neither joins nor frees what belongs to its parent.
            const auto release = [](Engine* engine) {
              if (engine->is_in_own_process()) delete engine;
            };
            std::unique_ptr<Tier> tier;
            std::unique_ptr<Runtime> runtime;
            if (!cuda_library.empty()) {
              const std::shared_ptr<CudaApi> api = load_cuda(cuda_library);
              runtime = std::make_unique<CudaRuntime>(api, std::make_unique<ThreadsRuntime>(), device, kernel_onloads);
              tier = pinned_arena(api, device, config, geometry);
            }
            return std::shared_ptr<Engine>(new Engine(config, geometry, pages, std::move(tier), std::move(runtime), options), release);
          },
          "config"_a, "num_layers"_a, "k_row_bytes"_a, "v_row_bytes"_a, "table"_a, "table_pages"_a, "staged_onload"_a = false,
          "staged_offload"_a = false, "busy_wait_ms"_a = 0, "read_region"_a = false, "cuda_library"_a = "", "device"_a = 0, "kernel_onloads"_a = false)
      .def("inject_faults",
           [](Engine& self, int64_t onload_copy, int64_t offload_copy, int64_t delay_us) {
             Faults& faults = self.runtime().faults;
             faults.onload_copy = onload_copy;
             faults.offload_copy = offload_copy;
             faults.delay_us = delay_us;
           },
           "onload_copy"_a = 0, "offload_copy"_a = 0, "delay_us"_a = 0)
      .def("begin",
           [](std::shared_ptr<Engine> self, uintptr_t users, uintptr_t lengths, uintptr_t candidates, int64_t rows, int64_t context_tokens,
              uintptr_t token_hashes, uintptr_t context_keys, uint32_t version, uintptr_t layout, bool may_wait, uintptr_t stream) {
             auto batch = std::make_unique<NativeBatch>();
             batch->engine = self;
             const auto requests = read_requests(users, lengths, token_hashes, context_keys, rows, context_tokens);
             batch->candidates.assign(at<const int64_t>(candidates), at<const int64_t>(candidates) + rows);
             for (int64_t i = 0; i < rows; ++i)
               if (batch->candidates[i] < 0)
                 throw std::invalid_argument("num_candidates[" + std::to_string(i) + "] is " + std::to_string(batch->candidates[i]) + "; it cannot be negative");
             if (auto* cuda = dynamic_cast<CudaRuntime*>(&self->runtime())) batch->compute = cuda->wrap_stream(at<void>(stream), "compute");
             const auto begin = [&] { self->begin(requests, static_cast<int32_t>(context_tokens), version, batch->open, batch->compute.get()); };
             if (may_wait) {
               nb::gil_scoped_release release;
               begin();
             } else {
               begin();
             }
             write_layout(batch->open.batch, batch->candidates, at<int64_t>(layout));
             return batch;
           })
      .def("commit", [](Engine& self, NativeBatch& b) { self.commit(b.open); })
      .def("abort", [](Engine& self, NativeBatch& b) { if (b.open.batch.open) self.abort(b.open); })
      .def("start_timeline", [](Engine& self, size_t limit) { self.runtime().start_timeline(limit); }, "limit"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def("take_timeline",
           [](Engine& self) {
             std::vector<Timeline::Span> spans;
             {
               nb::gil_scoped_release release;
               spans = self.runtime().take_timeline();
             }
             nb::list out;
             for (const Timeline::Span& s : spans) out.append(nb::make_tuple(s.stream, s.name, s.begin, s.end));
             return out;
           })
      .def("prefetch", [](Engine& self, std::vector<int64_t> users, uint32_t version) { self.prefetch(users, version); })
      .def("evict", [](Engine& self, std::vector<int64_t> users) { self.evict(users); })
      .def("clear", &Engine::clear)
      .def("retire_version", [](Engine& self, uint32_t version) { self.index().retire_version(version); })
      .def("drain", &Engine::drain, nb::call_guard<nb::gil_scoped_release>())
      .def("flush", &Engine::flush, nb::call_guard<nb::gil_scoped_release>())
      .def("close", &Engine::close, nb::call_guard<nb::gil_scoped_release>())
      .def("touch_arena",
           [](Engine& self, int64_t bytes) {
             auto* arena = dynamic_cast<HostArena*>(&self.tier());
             return arena == nullptr ? int64_t{0} : arena->touch(bytes, static_cast<int>(std::max(1u, std::thread::hardware_concurrency())));
           },
           nb::call_guard<nb::gil_scoped_release>())
      .def("host_capacity", [](Engine& self) { return self.tier().capacity(); })
      .def("lengths", [](Engine& self, int64_t user, uint32_t version) {
        const auto l = self.index().lengths(user, version);
        return nb::make_tuple(l.committed, l.device, l.host);
      })
      .def("check", [](Engine& self) { return self.index().check(); })
      .def("error", [](Engine& self) { return self.runtime().error(); })
      .def("take_warning", [](Engine& self) {
        auto* cuda = dynamic_cast<CudaRuntime*>(&self.runtime());
        return cuda == nullptr ? std::string() : cuda->take_warning();
      })
      .def("stats", [](Engine& self) {
        nb::dict out = to_dict(self.index().counters(), self.index().gauges());
        nb::list waits, wait_ns;
        for (const auto& layer : self.transfer_counters().layers) {
          waits.append(layer.waits.load());
          wait_ns.append(layer.wait_ns.load());
        }
        out["layer_waits"] = waits;
        out["layer_wait_ns"] = wait_ns;
        out["onload_bytes"] = self.transfer_counters().onload_bytes.load();
        out["offload_bytes"] = self.transfer_counters().offload_bytes.load();
        return out;
      });

  nb::class_<TransferTask>(m, "TransferTask")
      .def_ro("ticket", &TransferTask::ticket)
      .def_ro("entry", &TransferTask::entry)
      .def_ro("first", &TransferTask::first)
      .def_ro("end", &TransferTask::end)
      .def_ro("pages", &TransferTask::pages)
      .def_prop_ro("blocks", [](const TransferTask& t) {
        nb::list out;
        for (const Block& block : t.blocks) out.append(nb::make_tuple(block.slot, block.order));
        return out;
      });

  nb::class_<PlannedBatch>(m, "PlannedBatch")
      .def_prop_ro("onloads", [](const PlannedBatch& b) { return b.onloads; })
      .def_prop_ro("is_open", [](const PlannedBatch& b) { return b.batch.open; })
      .def_prop_ro("loads", [](const PlannedBatch& b) { return b.batch.loads; })
      .def_prop_ro("rows", [](const PlannedBatch& b) {
        nb::list out;
        for (const BatchRow& row : b.batch.rows) {
          nb::list pages;
          for (int32_t i = 0; i < row.num_pages; ++i) pages.append(b.batch.pages[row.first_page + i]);
          out.append(nb::make_tuple(row.cached, row.stores, pages));
        }
        return out;
      });

  nb::class_<Index>(m, "Index")
      .def(nb::init<const IndexConfig&>())
      .def("begin",
           [](Index& self, std::vector<int64_t> users, std::vector<int64_t> lengths, int32_t context_tokens, uint32_t version,
              std::vector<uint64_t> token_hashes, std::vector<uint64_t> context_keys) {
             auto planned = std::make_unique<PlannedBatch>();
             const auto address = [](auto& v) { return v.empty() ? 0 : reinterpret_cast<uintptr_t>(v.data()); };
             const auto requests = read_requests(address(users), address(lengths), address(token_hashes), address(context_keys),
                                                 static_cast<int64_t>(users.size()), context_tokens);
             self.begin(requests, context_tokens, version, planned->batch, planned->onloads);
             return planned;
           },
           "users"_a, "lengths"_a, "context_tokens"_a = 0, "version"_a = 0, "token_hashes"_a = std::vector<uint64_t>{},
           "context_keys"_a = std::vector<uint64_t>{})
      .def("commit", [](Index& self, PlannedBatch& b) {
        std::vector<TransferTask> offloads;
        self.commit(b.batch, offloads);
        return offloads;
      })
      .def("abort", [](Index& self, PlannedBatch& b) { self.abort(b.batch, false); })
      .def("offload_gathered", &Index::offload_gathered, "task"_a)
      .def("onload_done", [](Index& self, const TransferTask& task, bool ok) {
        std::vector<TransferTask> next;
        self.onload_done(task, ok, next);
        return next;
      }, "task"_a, "ok"_a = true)
      .def("offload_done", [](Index& self, const TransferTask& task, bool ok) {
        std::vector<TransferTask> next;
        self.offload_done(task, ok, next);
        return next;
      }, "task"_a, "ok"_a = true)
      .def("prefetch", [](Index& self, std::vector<int64_t> users, uint32_t version) {
        std::vector<TransferTask> onloads;
        self.prefetch(users, version, onloads);
        return onloads;
      }, "users"_a, "version"_a = 0)
      .def("plan_flush", [](Index& self) {
        std::vector<TransferTask> offloads;
        self.plan_flush(offloads);
        return offloads;
      })
      .def("evict", [](Index& self, std::vector<int64_t> users) { self.evict(users); })
      .def("clear", &Index::clear)
      .def("retire_version", &Index::retire_version)
      .def("lengths", [](Index& self, int64_t user, uint32_t version) {
        const auto l = self.lengths(user, version);
        return nb::make_tuple(l.committed, l.device, l.host);
      }, "user"_a, "version"_a = 0)
      .def("user_bytes", &Index::user_bytes)
      .def("check", &Index::check)
      .def("stats", [](Index& self) { return to_dict(self.counters(), self.gauges()); });

  // Columns cross as addresses: int64 users and lengths, bool invalidated.
  nb::class_<Simulation>(m, "Simulation")
      .def(nb::init<const IndexConfig&, int32_t, int32_t>(), "config"_a, "batch_size"_a, "offload_delay"_a = 0)
      .def("run",
           [](Simulation& self, uintptr_t users, uintptr_t lengths, uintptr_t invalidated, int64_t count) {
             self.run(at<const int64_t>(users), at<const int64_t>(lengths), at<const bool>(invalidated), count);
           },
           nb::call_guard<nb::gil_scoped_release>())
      .def("finish", &Simulation::finish, nb::call_guard<nb::gil_scoped_release>())
      .def("check", [](const Simulation& self) { return self.index().check(); })
      .def("stats", [](const Simulation& self) {
        nb::dict out = to_dict(self.index().counters(), self.index().gauges());
        out["committed_before_tokens"] = self.totals().committed_before_tokens;
        out["index_ns"] = self.totals().index_ns;
        return out;
      });
}

}  // namespace mtserve
