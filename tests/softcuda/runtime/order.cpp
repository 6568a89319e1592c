// Finds two accesses to the same bytes, one of them a write, on two streams that neither an event nor a wait of the
// host orders. It goes by address, so it also finds memory that the allocator gave away too early.
#include "order.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <set>
#include <string>

#include "runtime.h"

namespace soft {
namespace {

// 1: looks for them, and says each when it is found; 2: keeps them for who asks.
const long watches = setting("SOFTCUDA_HAZARDS", 0);

struct Known { Place place; Clock clock; };
auto& streams = *new std::vector<Known>;  // Which threads may still use at exit, as all that is here.
auto& host = *new Clock;

// A piece of a stream's work, by its number there.
struct Point { int stream = -1; uint32_t count = 0; const char* name = ""; };
// Bytes up to the end, which have the same accesses: the last write, and of each stream the last read after that.
struct Piece { size_t end; Point write; std::vector<Point> reads; };
auto& memory = *new std::map<size_t, Piece>;
auto& found = *new std::map<std::string, long>;

void join(Clock& to, const Clock& from) {
  if (to.size() < from.size()) to.resize(from.size());
  for (size_t k = 0; k < from.size(); k++) to[k] = std::max(to[k], from[k]);
}

// The same text at an address that stays.
const char* kept(const char* name) {
  static auto* names = new std::set<std::string>;
  return names->insert(name).first->c_str();
}

bool before(const Point& point, int stream) {
  auto& clock = streams[stream].clock;
  return point.stream < 0 || point.stream == stream ||
         (size_t(point.stream) < clock.size() && clock[point.stream] >= point.count);
}

std::string named(int stream) {
  return "stream " + std::to_string(stream) + " of cuda:" + std::to_string(place_of(stream).device);
}

void report(const char* kind, const Point& was, const Point& is) {
  auto text = std::string(kind) + ": " + is.name + " on " + named(is.stream) + " does not wait for " + was.name +
              " on " + named(was.stream);
  if (found[text]++ == 0 && watches == 1) fprintf(stderr, "softcuda: %s\n", text.c_str());
}

// Splits the piece that the address lies in, so that one begins there.
void cut(size_t at) {
  auto it = memory.upper_bound(at);
  if (it == memory.begin()) return;
  --it;
  if (it->first == at || it->second.end <= at) return;
  memory[at] = it->second;
  it->second.end = at;
}

void check(Piece& piece, const Point& point, bool writes) {
  if (!before(piece.write, point.stream)) report(writes ? "write after write" : "read after write", piece.write, point);
  if (writes) {
    for (auto& read : piece.reads)
      if (!before(read, point.stream)) report("write after read", read, point);
    piece.write = point;
    piece.reads.clear();
    return;
  }
  auto same = std::find_if(piece.reads.begin(), piece.reads.end(), [&](auto& it) { return it.stream == point.stream; });
  if (same == piece.reads.end()) piece.reads.push_back(point);
  else *same = point;
}

// All pieces from one address to another, those in between that nothing has used included.
void check(size_t begin, size_t end, const Point& point, bool writes) {
  cut(begin), cut(end);
  for (auto at = begin; at < end;) {
    auto it = memory.lower_bound(at);
    if (it == memory.end() || it->first > at) {
      auto stop = it == memory.end() ? end : std::min(end, it->first);
      it = memory.insert({at, Piece{stop, {}, {}}}).first;
    }
    check(it->second, point, writes);
    at = it->second.end;
  }
}

}  // namespace

int new_stream(int device, int priority) {
  streams.push_back({{device, priority}, {}});
  return static_cast<int>(streams.size()) - 1;
}

Place place_of(int stream) { return streams[stream].place; }
const Clock& clock_of(int stream) { return streams[stream].clock; }
void host_waits(const Clock& clock) { join(host, clock); }
void host_waits_for(int device) {
  for (auto& it : streams)
    if (device == kAll || it.place.device == device) join(host, it.clock);
}
bool host_knows(const Clock& clock) {
  for (size_t k = 0; k < clock.size(); k++)
    if (clock[k] > (k < host.size() ? host[k] : 0)) return false;
  return true;
}
void stream_waits(int stream, const Clock& clock) { join(streams[stream].clock, clock); }

void access(int stream, const Access* its, int count, const char* name, double work, size_t bytes) {
  auto& clock = streams[stream].clock;
  log_work(stream, name, work, bytes);
  join(clock, host);
  if (clock.size() <= size_t(stream)) clock.resize(stream + 1);
  Point point{stream, ++clock[stream], ""};
  if (watches == 0) return;
  point.name = kept(name);
  for (int k = 0; k < count; k++) {
    auto begin = reinterpret_cast<size_t>(its[k].at);
    if (its[k].size > 0) check(begin, begin + its[k].size, point, its[k].writes);
  }
}

void forget(const void* at, size_t size) {
  if (watches == 0) return;
  auto begin = reinterpret_cast<size_t>(at);
  cut(begin), cut(begin + size);
  memory.erase(memory.lower_bound(begin), memory.lower_bound(begin + size));
}

}  // namespace soft

// "count text" of each pair found, a line each.
API const char* softcuda_hazards() {
  soft::Hold hold(soft::lock);
  std::string text;
  for (auto& it : soft::found) text += std::to_string(it.second) + " " + it.first + "\n";
  return soft::told(text);
}
API void softcuda_forget_hazards() {
  soft::Hold hold(soft::lock);
  soft::found.clear();
}
