// The machine behind simt.h: fibers, a scheduler of one block, rendezvous of warps and blocks.
#include "simt.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace simt {

void end_bulk_copies();  // bulk_model.cpp

namespace {

constexpr unsigned kWarp = 32;
constexpr std::size_t kStackBytes = 64 * 1024;
constexpr std::size_t kChains = 32;  // launches whose chains are kept
constexpr int kIdlePasses = 1000;  // passes of nothing but pause() that count as a deadlock

// ---- switching between fibers -------------------------------------------------------------------

#if defined(__x86_64__)

// Saves the callee-saved registers on the running stack, and goes on where the other stack stopped.
// A system call per switch (ucontext) would cost twenty times as much.
extern "C" void topoep_simt_switch(void** save, void* go_on);
asm(R"(
  .text
  .hidden topoep_simt_switch
  .globl topoep_simt_switch
topoep_simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

struct Context {
  void* stack = nullptr;

  void prepare(char* low, void (*entry)()) {
    auto top = reinterpret_cast<std::uintptr_t>(low + kStackBytes) & ~std::uintptr_t(15);
    auto* words = reinterpret_cast<void**>(top);
    *--words = nullptr;  // where a return address would be: the stack is aligned as after a call
    *--words = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--words = nullptr;
    stack = words;
  }
  static void swap(Context& from, Context& to) { topoep_simt_switch(&from.stack, to.stack); }
};

#else

struct Context {
  ucontext_t context;

  void prepare(char* low, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = low;
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
  }
  static void swap(Context& from, Context& to) { swapcontext(&from.context, &to.context); }
};

#endif

// ---- state --------------------------------------------------------------------------------------

enum class State { kReady, kPaused, kBarrier, kCollective, kExited };

struct Thread {
  Context context;
  State state = State::kReady;
  Site site{};
  std::uint64_t result = 0;
};

// A warp collective that lanes are arriving at. One per lowest lane of a mask: masks are disjoint.
struct Gathering {
  unsigned mask = 0, arrived = 0;
  Op op = Op::kSync;
  Site site{};
  std::uint64_t value[kWarp];
  unsigned from[kWarp];
};

struct Warp {
  unsigned alive = 0, open = 0;  // open: lanes named by gatherings that are not complete
  std::int64_t steps = 0;        // collectives and barriers behind it, one after the other
  Gathering gathering[kWarp];
};

struct Machine {
  Order order = Order::kForward;
  std::uint64_t random = 1;
  Counters counters{};
  std::vector<std::int64_t> chains;  // `longest` of every launch under this schedule
  std::string error;

  unsigned blocks = 0, threads = 0, block = 0, current = 0;
  void (*body)(void*) = nullptr;
  void* argument = nullptr;
  char* shared = nullptr;
  bool failed = false;
  std::int64_t progress = 0;
  unsigned at_barrier = 0, first_at_barrier = 0, exited = 0;
  Context scheduler;
  std::vector<Thread> thread;
  std::vector<Warp> warp;
  std::unique_ptr<char[]> stacks;
  std::size_t stack_count = 0;

  Thread& running() { return thread[current]; }
};

thread_local Machine machine;

std::string describe(unsigned thread) { return "thread " + std::to_string(thread); }

std::string describe(Site site) {
  const char* name = std::strrchr(site.file, '/');
  return std::string(name ? name + 1 : site.file) + ":" + std::to_string(site.line);
}

bool same(Site a, Site b) { return a.line == b.line && std::strcmp(a.file, b.file) == 0; }

std::uint64_t next_random() {  // xorshift64
  std::uint64_t& x = machine.random;
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  return x;
}

void report(const std::string& what) {
  if (machine.failed) return;
  machine.failed = true;
  machine.error = "block " + std::to_string(machine.block) + ": " + what;
}

void switch_out() { Context::swap(machine.running().context, machine.scheduler); }

void wait(State state, Site site) {
  machine.running().state = state;
  machine.running().site = site;
  switch_out();
}

[[noreturn]] void fail(const std::string& what) {
  report(what);
  for (;;) switch_out();  // the scheduler does not come back
}

void fiber_main() {
  machine.body(machine.argument);
  Machine& m = machine;
  m.running().state = State::kExited;
  m.warp[m.current / kWarp].alive &= ~(1u << m.current % kWarp);
  ++m.exited;
  ++m.progress;
  if (m.at_barrier) {
    report(describe(m.current) + " exited while " + describe(m.first_at_barrier) +
           " waits at the barrier in " + describe(m.thread[m.first_at_barrier].site));
  }
  for (;;) switch_out();
}

// ---- warp collectives ---------------------------------------------------------------------------

void complete(Warp& warp, Gathering& g, unsigned first_thread) {
  std::uint64_t common = g.op == Op::kMin ? ~std::uint64_t(0) : 0;
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if (!(g.mask >> lane & 1)) continue;
    const std::uint64_t v = g.value[lane];
    switch (g.op) {
      case Op::kBallot: common |= v << lane; break;
      case Op::kAdd: common += v; break;
      case Op::kMin: common = v < common ? v : common; break;
      case Op::kMax: common = v > common ? v : common; break;
      case Op::kOr: common |= v; break;
      default: break;
    }
  }
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if (!(g.mask >> lane & 1)) continue;
    Thread& t = machine.thread[first_thread + lane];
    t.result = common;
    if (g.op == Op::kShuffle) t.result = g.value[g.from[lane]];
    if (g.op == Op::kMatch) {
      t.result = 0;
      for (unsigned other = 0; other < kWarp; ++other) {
        if (g.mask >> other & 1 && g.value[other] == g.value[lane]) t.result |= 1u << other;
      }
    }
    if (t.state == State::kCollective) t.state = State::kReady;
  }
  warp.open &= ~g.mask;
  g.arrived = 0;
}

// ---- scheduler ----------------------------------------------------------------------------------

void resume(unsigned thread) {
  machine.current = thread;
  Context::swap(machine.scheduler, machine.running().context);
}

// [first, end) in the order of the schedule.
void fill_order(unsigned first, unsigned end, std::vector<unsigned>& order) {
  const unsigned n = end - first;
  order.resize(n);
  for (unsigned i = 0; i < n; ++i) {
    order[i] = machine.order == Order::kReverse ? end - 1 - i : first + i;
  }
  if (machine.order == Order::kRandom) {
    for (unsigned i = n; i > 1; --i) std::swap(order[i - 1], order[next_random() % i]);
  }
}

// Lets every ready thread in [first, end) run once; true when any could.
bool pass(unsigned first, unsigned end, std::vector<unsigned>& order) {
  fill_order(first, end, order);
  bool ran = false;
  for (unsigned t : order) {
    if (machine.thread[t].state != State::kReady) continue;
    ran = true;
    resume(t);
    if (machine.failed) return true;
  }
  return ran;
}

void report_deadlock() {
  std::string what = "no thread can go on:";
  int listed = 0;
  for (unsigned t = 0; t < machine.threads; ++t) {
    const Thread& thread = machine.thread[t];
    if (thread.state == State::kExited) continue;
    if (++listed > 4) {
      what += " ...";
      break;
    }
    what += " " + describe(t);
    if (thread.state == State::kPaused) {
      what += " waits in pause();";
    } else if (thread.state == State::kBarrier) {
      what += " waits at the barrier in " + describe(thread.site) + ";";
    } else {
      const Warp& warp = machine.warp[t / kWarp];
      unsigned missing = 0;
      for (const Gathering& g : warp.gathering) {
        if (g.arrived >> t % kWarp & 1) missing = g.mask & ~g.arrived;
      }
      what += " waits in " + describe(thread.site) + " for lane " +
              std::to_string(__builtin_ctz(missing)) + ";";
    }
  }
  report(what);
}

// Of all warps: steps that had to follow one another.
std::int64_t longest_chain() {
  std::int64_t steps = 0;
  for (const Warp& warp : machine.warp) steps = std::max(steps, warp.steps);
  return steps;
}

void run_block() {
  Machine& m = machine;
  m.at_barrier = m.exited = 0;
  m.thread.assign(m.threads, Thread());
  m.warp.assign((m.threads + kWarp - 1) / kWarp, Warp());
  for (unsigned t = 0; t < m.threads; ++t) {
    m.warp[t / kWarp].alive |= 1u << t % kWarp;
    m.thread[t].context.prepare(m.stacks.get() + t * kStackBytes, fiber_main);
  }
  const unsigned warps = unsigned(m.warp.size());
  std::vector<unsigned> order;
  for (int idle = 0; m.exited < m.threads && !m.failed;) {
    const std::int64_t before = m.progress;
    bool ran = false;
    if (m.order == Order::kRandom) {
      ran = pass(0, m.threads, order);
    } else {  // a warp goes on until all its lanes wait for others
      for (unsigned i = 0; i < warps && !m.failed; ++i) {
        const unsigned w = m.order == Order::kReverse ? warps - 1 - i : i;
        const unsigned end = std::min((w + 1) * kWarp, m.threads);
        while (!m.failed && pass(w * kWarp, end, order)) ran = true;
      }
    }
    if (m.failed) return;
    idle = m.progress == before ? idle + 1 : 0;
    const auto paused = [](const Thread& t) { return t.state == State::kPaused; };
    const bool waiting = std::any_of(m.thread.begin(), m.thread.end(), paused);
    if (m.exited < m.threads && ((!ran && !waiting) || idle > kIdlePasses)) {
      return report_deadlock();
    }
    for (Thread& thread : m.thread) {
      if (paused(thread)) thread.state = State::kReady;
    }
  }
  m.counters.longest = std::max(m.counters.longest, longest_chain());
}

}  // namespace

// ---- what kernels call --------------------------------------------------------------------------

Index thread_index() { return {machine.current}; }
Index block_index() { return {machine.block}; }
Index block_size() { return {machine.threads}; }
Index grid_size() { return {machine.blocks}; }
char* shared_memory() { return machine.shared; }

void block_barrier(Site site) {
  Machine& m = machine;
  if (m.exited) {
    fail(describe(m.current) + " reaches the barrier in " + describe(site) + ", " +
         std::to_string(m.exited) + " thread(s) have exited before it");
  }
  const Site first = m.thread[m.first_at_barrier].site;
  if (m.at_barrier && !same(first, site)) {
    fail("divergent barriers: " + describe(m.first_at_barrier) + " waits in " + describe(first) +
         ", " + describe(m.current) + " in " + describe(site));
  }
  if (!m.at_barrier) m.first_at_barrier = m.current;
  ++m.progress;
  if (++m.at_barrier < m.threads) return wait(State::kBarrier, site);
  m.at_barrier = 0;
  ++m.counters.barriers;
  const std::int64_t steps = longest_chain() + 1;
  for (Warp& each : m.warp) each.steps = steps;
  for (Thread& thread : m.thread) thread.state = State::kReady;
}

std::uint64_t collective(Op op, unsigned mask, std::uint64_t value, unsigned from, Site site) {
  Machine& m = machine;
  const unsigned lane = m.current % kWarp;
  Warp& warp = m.warp[m.current / kWarp];
  if (!(mask >> lane & 1)) {
    fail(describe(m.current) + " calls a collective in " + describe(site) +
         " whose mask leaves it out");
  }
  if (mask & ~warp.alive) {
    fail("the mask in " + describe(site) + " names lane " +
         std::to_string(__builtin_ctz(mask & ~warp.alive)) + ", which is not running");
  }
  Gathering& g = warp.gathering[__builtin_ctz(mask)];
  if (!g.arrived) {
    if (warp.open & mask) {
      fail("masks overlap without being equal in " + describe(site));
    }
    warp.open |= mask;
    g.mask = mask;
    g.op = op;
    g.site = site;
  } else if (g.mask != mask || g.op != op || !same(g.site, site)) {
    fail("lanes of one warp meet in different collectives: " + describe(g.site) + " and " +
         describe(site));
  }
  if (op == Op::kShuffle && !(mask >> from & 1)) {
    fail(describe(m.current) + " reads lane " + std::to_string(from) + " in " + describe(site) +
         ", which the mask leaves out");
  }
  g.value[lane] = value;
  g.from[lane] = from;
  g.arrived |= 1u << lane;
  ++m.progress;
  if (g.arrived == mask) {
    ++m.counters.collectives;
    ++warp.steps;
    complete(warp, g, m.current - lane);
  } else {
    wait(State::kCollective, site);
  }
  return m.running().result;
}

void pause() { wait(State::kPaused, {"", 0}); }
void progressed() { ++machine.progress; }
void count_bulk_copy() { ++machine.counters.bulk_copies; }
void fail(const char* what) { fail(describe(machine.current) + " " + what); }

// ---- what hosts call ----------------------------------------------------------------------------

void set_schedule(Order order, std::uint64_t seed) {
  machine.order = order;
  machine.random = seed * 2 + 1;  // never zero
  machine.chains.clear();
}

const Counters& counters() { return machine.counters; }
const std::vector<std::int64_t>& chains() { return machine.chains; }
const char* error() { return machine.error.c_str(); }

int launch(unsigned blocks, unsigned threads, std::size_t shared_bytes, void (*body)(void*),
           void* argument) {
  Machine& m = machine;
  m.failed = false;
  m.error.clear();
  m.counters = {};
  m.progress = 0;
  m.blocks = blocks;
  m.threads = threads;
  m.body = body;
  m.argument = argument;
  if (m.stack_count < threads) {
    m.stacks.reset(new char[threads * kStackBytes]);
    m.stack_count = threads;
  }
#if defined(__SANITIZE_ADDRESS__)  // frames that were never left stay poisoned
  __asan_unpoison_memory_region(m.stacks.get(), m.stack_count * kStackBytes);
#endif
  std::vector<unsigned> order;
  fill_order(0, blocks, order);
  for (unsigned block : order) {
    void* shared = nullptr;  // of its exact size, so that a sanitizer sees accesses beyond it
    if (posix_memalign(&shared, 128, shared_bytes)) std::abort();
    std::memset(shared, 0xCD, shared_bytes);
    m.shared = static_cast<char*>(shared);
    m.block = block;
    run_block();
    end_bulk_copies();
    std::free(shared);
    if (m.failed) break;
  }
  if (m.chains.size() < kChains) m.chains.push_back(m.counters.longest);
  return m.failed;
}

}  // namespace simt
