// What streams were given, in the order in which the host gave it. Off until somebody asks for it.
#include <dlfcn.h>

#include <cstdio>
#include <string>
#include <vector>

#include "runtime.h"

namespace soft {
namespace {

struct Launch { const char* kind; int stream; unsigned long event; std::string name; double work; size_t bytes; };
auto& launches = *new std::vector<Launch>;
bool on = false;
long locked = 0;

// Whether this thread has the interpreter's lock; a process without an interpreter has none.
bool has_interpreter() {
  static auto* check = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  return check != nullptr && check();
}

}  // namespace

void log_work(int stream, const char* name, double work, size_t bytes) {
  if (on) launches.push_back({bytes > 0 ? "copy" : "op", stream, 0, name, work, bytes});
}

void log_event(const char* kind, int stream, unsigned long event) {
  if (on) launches.push_back({kind, stream, event, "event", 0, 0});
  if (has_interpreter()) locked++;
}

}  // namespace soft

using namespace soft;

// Empties the log, and keeps it from now on.
API void softcuda_log() {
  Hold hold(lock);
  on = true;
  launches.clear();
}
// "kind device stream priority event work bytes name" of each, a line each.
API const char* softcuda_launches() {
  Hold hold(lock);
  std::string text;
  char line[256];
  for (auto& it : launches) {
    auto place = place_of(it.stream);
    snprintf(line, sizeof line, "%s %d %d %d %lu %.17g %zu ", it.kind, place.device, it.stream, place.priority,
             it.event, it.work, it.bytes);
    text += line + it.name + "\n";
  }
  return told(text);
}
// How often a thread that held the interpreter's lock recorded an event, or had a stream wait for one.
API long softcuda_locked() { return locked; }
