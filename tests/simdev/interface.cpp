// What Python calls, by ctypes.
#include "memory.h"
#include "streams.h"

#include <sstream>

namespace {

void print(std::ostringstream& out, const std::vector<sim::Piece>& them) {
  out << ",[";
  for (size_t k = 0; k < them.size(); k++)
    out << (k ? ",[" : "[") << them[k].block << ',' << them[k].first << ',' << them[k].last << ']';
  out << ']';
}

}  // namespace

extern "C" {

// The log as JSON: a list of launches, each one a list of kind, device, stream, priority, event, name, multiplications,
// bytes, and what is read and written (block, first byte, one past the last). Good until the next call.
const char* sim_launches() {
  static std::string text;
  std::ostringstream out;
  const char* before = "[";
  for (auto& it : sim::launches()) {
    out << before << "[\"" << static_cast<char>(it.kind) << "\"," << static_cast<int>(it.stream.device_index()) << ','
        << it.stream.id() << ',' << sim::priority(it.stream) << ',' << it.event << ",\"" << it.name << "\","
        << it.multiplications << ',' << it.bytes;
    print(out, it.reads);
    print(out, it.writes);
    out << ']';
    before = ",\n";
  }
  out << (*before == '[' ? "[]" : "]");
  text = out.str();
  return text.c_str();
}

// Who made the devices' primary contexts, as JSON: device, call of the runtime, name of the thread. As above.
const char* sim_contexts() {
  static std::string text;
  std::ostringstream out;
  const char* before = "[";
  for (auto& it : sim::contexts()) {
    out << before << '[' << it.device << ",\"" << it.call << "\",\"" << it.thread << "\"]";
    before = ",";
  }
  out << (*before == '[' ? "[]" : "]");
  text = out.str();
  return text.c_str();
}

// Products that began without a context, as a JSON list of names.
const char* sim_unbound() {
  static std::string text;
  std::ostringstream out;
  const char* before = "[";
  for (auto& it : sim::unbound()) {
    out << before << '"' << it << '"';
    before = ",";
  }
  out << (*before == '[' ? "[]" : "]");
  text = out.str();
  return text.c_str();
}

size_t sim_locked() { return sim::locked(); }
void sim_set_pool(int size) { sim::set_pool(size); }

// Events of torch.sim's own class.
uint64_t sim_record(int device, int64_t stream) { return sim::record(sim::stream_of(device, stream)); }
void sim_wait(int device, int64_t stream, uint64_t event) { sim::wait(sim::stream_of(device, stream), event); }
void sim_synchronize(uint64_t event) { sim::launch({sim::Kind::SyncEvent, sim::default_stream(0), event}); }

// How many launches there are in the log.
size_t sim_launched() { return sim::launched(); }

// Forgets launches, and how much was allocated at most.
void sim_forget() {
  sim::forget_launches();
  for (int device = 0; device < sim::device_count(); device++) sim::forget_most_allocated(device);
}

void sim_fail_at(uint64_t number) { sim::fail_at(number); }
uint64_t sim_asked() { return sim::asked(); }
void sim_reset_peaks(int device) { sim::forget_most_allocated(device); }
size_t sim_cached(int device) { return sim::cached(device); }
size_t sim_allocated(int device) { return sim::allocated(device); }
size_t sim_most_allocated(int device) { return sim::most_allocated(device); }
}
