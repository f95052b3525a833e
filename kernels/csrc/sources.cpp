// Which sources a library was built from: TOPOEP_SOURCES, set by CMake, is the SHA-256 over their
// SHA-256s in the order of their paths. topoep_kernels/library.py refuses a library of other ones.
extern "C" __attribute__((visibility("default"))) const char* topoep_sources() {
  return TOPOEP_SOURCES;
}
