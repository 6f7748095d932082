// All schedules by number. machete_entries.inc: ENTRY(name) for each, written by build.sh.
#include "machete.h"

#define ENTRY(name) extern "C" const MacheteEntry name;
#include "machete_entries.inc"
#undef ENTRY
#define ENTRY(name) &name,
static const MacheteEntry* const entries[] = {
#include "machete_entries.inc"
};

extern "C" int machete_count() { return sizeof entries / sizeof *entries; }
extern "C" const char* machete_name(int i) { return entries[i]->name; }
extern "C" int machete_tokens(int i) { return entries[i]->tokens; }
extern "C" size_t machete_workspace(int i, int m, int n, int k, int group) {
  return entries[i]->workspace(m, n, k, group);
}
extern "C" int machete_run(int i, const void* x, const void* weight, const void* scales, void* out, int m, int n, int k,
                           int group, void* workspace, cudaStream_t stream) {
  return entries[i]->run(x, weight, scales, out, m, n, k, group, workspace, stream);
}
