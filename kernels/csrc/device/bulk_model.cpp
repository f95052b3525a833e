// The model behind bulk.h for simt.h: copies that happen as late as their waits allow.
#include "bulk.h"

#include <deque>
#include <vector>

namespace bulk {
namespace {

struct Load {
  void* shared;
  const void* global;
  std::uint32_t bytes;
  Barrier* barrier;
};

struct Store {
  void* global;
  const void* shared;
  std::uint32_t bytes;
  std::vector<char> read;  // the bytes, once they left shared memory
};

struct Group {
  unsigned thread;
  std::vector<Store> stores;
  bool committed, was_read;
};

// Of the running block.
thread_local std::vector<Load> loads;
thread_local std::deque<Group> groups;

void check(const void* a, const void* b, std::uint32_t bytes) {
  const auto bits = reinterpret_cast<std::uintptr_t>(a) | reinterpret_cast<std::uintptr_t>(b) | bytes;
  if (bits % 16) simt::fail("starts a bulk copy whose addresses and size are not multiples of 16");
  simt::count_bulk_copy();
}

void read(Group& group) {
  for (Store& s : group.stores) {
    const auto* from = static_cast<const char*>(s.shared);
    s.read.assign(from, from + s.bytes);
  }
  group.was_read = true;
}

void write(const Group& group) {
  for (const Store& s : group.stores) std::memcpy(s.global, s.read.data(), s.bytes);
}

}  // namespace

void init(Barrier* barrier) { *barrier = {0, 1, 0}; }

void expect(Barrier* barrier, std::uint32_t bytes) {
  if (!barrier->arrivals_left) simt::fail("expects bytes twice in one phase of a barrier");
  barrier->bytes_left += bytes;
  --barrier->arrivals_left;
  simt::progressed();
}

void load(void* shared, const void* global, std::uint32_t bytes, Barrier* barrier) {
  check(shared, global, bytes);
  std::memset(shared, 0xEE, bytes);
  loads.push_back({shared, global, bytes, barrier});
}

void wait(Barrier* barrier, std::uint32_t parity) {
  while ((barrier->phase & 1) == parity) {
    if (barrier->arrivals_left) {
      simt::pause();
      continue;
    }
    for (std::size_t i = 0; i < loads.size();) {
      const Load l = loads[i];
      if (l.barrier != barrier) {
        ++i;
        continue;
      }
      std::memcpy(l.shared, l.global, l.bytes);
      barrier->bytes_left -= l.bytes;
      loads.erase(loads.begin() + std::ptrdiff_t(i));
    }
    if (barrier->bytes_left) simt::fail("waits for other bytes than its barrier's loads bring");
    ++barrier->phase;
    barrier->arrivals_left = 1;
    simt::progressed();
  }
}

void store(void* global, const void* shared, std::uint32_t bytes) {
  check(global, shared, bytes);
  const unsigned thread = threadIdx.x;
  if (groups.empty() || groups.back().committed || groups.back().thread != thread) {
    groups.push_back({thread, {}, false, false});
  }
  groups.back().stores.push_back({global, shared, bytes, {}});
}

void commit() {
  if (!groups.empty()) groups.back().committed = true;
}

void wait_groups(int newest, bool written) {
  const unsigned thread = threadIdx.x;
  int own = 0;
  for (const Group& g : groups) own += g.thread == thread && g.committed;
  for (std::size_t i = 0; i < groups.size() && own > newest;) {
    Group& g = groups[i];
    if (g.thread != thread || !g.committed) {
      ++i;
      continue;
    }
    --own;
    if (!g.was_read) read(g);
    if (!written) {
      ++i;
      continue;
    }
    write(g);
    groups.erase(groups.begin() + std::ptrdiff_t(i));
  }
}

}  // namespace bulk

namespace simt {

// A block that ends without wait_read frees shared memory that copies still need: they are lost.
void end_bulk_copies() {
  for (const bulk::Group& g : bulk::groups) {
    if (g.was_read) bulk::write(g);
  }
  bulk::groups.clear();
  bulk::loads.clear();
}

}  // namespace simt
